// Sphinx's search requires all words of a query in one page. This script also finds the synonyms within a longer query
// ("llama rope scaling"), and the pages with most of the words if no page has all.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return; // only the search page has it
  const searchAllWords = Search._performSearch;

  /** Return the query's groups of neighbouring words that are synonyms, such as "rope scaling". */
  const listSynonyms = (query) => {
    const words = ` ${query.toLowerCase().split(/\s+/).join(" ")} `;
    return Object.keys(Search._index.indexentries).filter((entry) => words.includes(` ${entry} `));
  };

  Search._performSearch = (query, searchTerms, excludedTerms, highlightTerms, objectTerms) => {
    const search = (words, terms) => searchAllWords(words, terms, excludedTerms, highlightTerms, objectTerms);
    const results = search(query, searchTerms);
    const entries = listSynonyms(query).filter((entry) => entry !== query.toLowerCase().trim());
    const sources = entries.map((entry) => search(entry, new Set(["\u0000"])));
    if (!results.length) sources.push(...[...searchTerms].map((term) => search(term, new Set([term]))));
    if (!sources.length) return results;
    // A page's score is the sum over the searches that have it; its best result stands for it.
    const pages = new Map();
    for (const result of [results, ...sources].flat()) {
      const known = pages.get(result[0]);
      const score = result[4] + (known ? known.score : 0);
      pages.set(result[0], { score, best: known && known.best[4] >= result[4] ? known.best : result });
    }
    const merged = [...pages.values()].map(({ score, best }) => [...best.slice(0, 4), score, ...best.slice(5)]);
    return merged.sort((left, right) => left[4] - right[4]); // the last is shown first
  };
});
