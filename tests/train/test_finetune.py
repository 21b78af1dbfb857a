"""Fine-tuning of a run: starts from its checkpoint, adapters, what is exported of them, and conversations."""

from __future__ import annotations

import builtins
import io
import itertools
import json
import shutil
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megascale import api
from megascale.checkpoint.complete_checkpoint import open_checkpoint
from megascale.cli.trained_run import _talk
from megascale.config import ModelConfig, from_tree
from megascale.core.adapters import is_adapter
from megascale.core.layout import lay_out
from megascale.data.prepare.chat_builder import build_chat
from megascale.data.tokenizer.chat_template import ChatTemplate
from megascale.data.tokenizer.tokenizer import train_tokenizer
from megascale.errors import ConfigError, DataError
from megascale.model.transformer import Chunk
from megascale.optim.learning_rate import compute_learning_rate
from megascale.train.chat import ChatSession
from megascale.train.engine import Engine
from megascale.train.generation import Sampling
from megascale.train.restore import restore_model
from tests.conftest import lines

QUESTIONS = {"What is one plus one?": "It is two.", "Who are you?": "A small model.", "Say yes.": "Yes!"}
STEPS = 50
OPTIONS = [
    "--train.device=cpu",
    "--train.threads=1",
    "--train.micro_batch=2",
    "--train.global_batch=4",
    "--observe.tensorboard=false",
    "--observe.spans=0",
    "--checkpoint.interval=0",
]
MODEL = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn_hidden": 48,
    "sequence_length": 48,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "positions": "rotary",
    "tied_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "init_std": 0.1,
}
LORA = ["--train.lora.rank=3", "--train.lora.alpha=6", "--train.lora.targets=attention.query,mlp.gate,mlp.out"]
FRESH = "--checkpoint.start_state=fresh"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with conversations `chat`, and a run `runs/base` that has learnt them."""
    folder = tmp_path_factory.mktemp("finetune")
    records = []
    for number in range(40):
        question, answer = list(QUESTIONS.items())[number % len(QUESTIONS)]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        records.append(json.dumps({"messages": messages, "number": number}))
    (folder / "chat.jsonl").write_text("\n".join(records))
    build_chat(folder / "chat", [folder / "chat.jsonl"], vocab_size=300)
    settings = [f"--model.{key}={json.dumps(value)}" for key, value in MODEL.items()]
    result = train(folder, "base", *settings, f"--train.steps={STEPS}", "--lr.peak=2e-2", "--lr.min=1e-3")
    assert result.evaluation is not None
    assert result.evaluation.loss < 0.1
    return folder


def train(folder: Path, name: str, *arguments: str):
    data = [f"--data.train={folder}/chat/train", f"--data.valid={folder}/chat/valid"]
    settings = data + [f"--train.runs={folder}/runs", f"--train.name={name}"] + OPTIONS + list(arguments)
    return api.train(api.load_config(None, settings))


def start_from(folder: Path, run: str = "base") -> str:
    return f"--checkpoint.start_from={folder}/runs/{run}"


def read_losses(folder: Path, name: str) -> list[float]:
    return [record["loss"] for record in lines(folder / "runs" / name / "metrics.jsonl") if "loss" in record]


@pytest.fixture(scope="module")
def fresh(work: Path) -> Path:
    """A run that starts from the weights of `base`."""
    train(work, "fresh", start_from(work), FRESH, "--train.steps=2", "--lr.peak=1e-3")
    return work / "runs" / "fresh"


def test_a_fresh_start_takes_the_weights_and_begins_anew(work, fresh) -> None:
    metrics = lines(work / "runs" / "fresh" / "metrics.jsonl")
    assert [record["step"] for record in metrics if "loss" in record] == [1, 2]
    assert metrics[0]["loss"] < 0.2  # it began with the trained weights, whose shape was not given
    state = open_checkpoint(work / "runs" / "fresh").state
    assert (state["step"], state["samples"]) == (2, 8)
    moments = open_checkpoint(work / "runs" / "fresh").tensors
    assert any(name.startswith("optimizer.exp_avg.") for name in moments)


def test_a_continued_start_goes_on_as_the_run_itself(work) -> None:
    """The same run, trained further under its own name, is the reference."""
    shutil.copytree(work / "runs" / "base", work / "further" / "base")
    data = [f"--data.train={work}/chat/train", f"--data.valid={work}/chat/valid"]
    settings = data + [f"--train.steps={STEPS + 3}", f"--train.runs={work}/further"] + OPTIONS + ["--lr.peak=2e-2"]
    api.train(api.load_config(work / "further" / "base" / "config.toml", settings))
    options = [f"--train.steps={STEPS + 3}", "--lr.peak=2e-2", "--lr.min=1e-3"]
    result = train(work, "continued", start_from(work), "--checkpoint.start_state=continued", *options)
    assert result.step == STEPS + 3
    expected = [record for record in lines(work / "further" / "base" / "metrics.jsonl") if record["step"] > STEPS]
    ours = lines(work / "runs" / "continued" / "metrics.jsonl")
    for name in ("step", "loss", "learning_rate", "grad_norm"):
        assert [r[name] for r in ours if name in r] == [r[name] for r in expected if name in r], name
    config = api.load_config(work / "runs" / "continued" / "config.toml")
    assert ours[0]["learning_rate"] == pytest.approx(compute_learning_rate(config.lr, STEPS + 1, STEPS + 3))
    # With other samples the step goes on, and the samples begin anew.
    shuffled = options + ["--train.seed=7", "--train.stop_after=1"]
    train(work, "others", start_from(work), "--checkpoint.start_state=continued", *shuffled)
    state = open_checkpoint(work / "runs" / "others").state
    assert (state["step"], state["samples"]) == (STEPS + 1, 4)
    resumed = train(work, "others", start_from(work), "--checkpoint.start_state=continued", *options, "--train.seed=7")
    assert resumed.step == STEPS + 3


def test_a_start_asks_what_goes_on_and_names_what_is_wrong(work) -> None:
    for arguments, error, message in (
        ([start_from(work)], ConfigError, "needs checkpoint.start_state; set it to fresh"),
        (["--checkpoint.start_state=fresh"], ConfigError, "no effect without checkpoint.start_from"),
        ([start_from(work, "missing"), FRESH], DataError, "checkpoint.start_from=.*missing is unusable"),
        (
            [start_from(work), FRESH, "--model.hidden=64"],
            DataError,
            r"of another model: model.hidden was 32 and is 64.*, or omit --checkpoint.start_from",
        ),
        ([start_from(work), "--checkpoint.start_state=continued", "--train.steps=9"], ConfigError, "is reached"),
        (LORA + [start_from(work), "--checkpoint.start_state=continued"], ConfigError, "has no state of adapters"),
        (LORA + ["--model.preset=tiny"], ConfigError, "trains adapters of an existing model, and none is named"),
    ):
        with pytest.raises(error, match=message):
            train(work, "refused", *arguments)


@pytest.fixture(scope="module")
def adapted(work: Path) -> Path:
    """A run with adapters, interrupted and resumed."""
    options = [start_from(work), FRESH] + LORA + ["--train.steps=6", "--lr.peak=3e-2"]
    train(work, "adapted", *options, "--train.stop_after=3")
    assert train(work, "adapted", *options).finished
    return work / "runs" / "adapted"


def test_adapters_are_saved_alone_and_resume_exactly(work, fresh, adapted) -> None:
    stored = open_checkpoint(adapted)
    names = [name.partition(".")[2] for name in stored.tensors if name.startswith("model.")]
    assert len(names) == 2 * 3 * MODEL["layers"]
    assert all(is_adapter(name) for name in names)
    uninterrupted = train(work, "uninterrupted", start_from(work), FRESH, *LORA, "--train.steps=6", "--lr.peak=3e-2")
    assert read_losses(work, "adapted") == read_losses(work, "uninterrupted")
    assert read_losses(work, "adapted")[0] == pytest.approx(read_losses(work, "fresh")[0], rel=1e-5)
    # Evaluation and generation read the adapters merged into their model.
    assert uninterrupted.evaluation is not None
    assert api.evaluate(adapted).loss == pytest.approx(uninterrupted.evaluation.loss, rel=1e-4)
    assert uninterrupted.evaluation.weight_sum is not None
    assert uninterrupted.evaluation.weight_sum < uninterrupted.evaluation.tokens


def test_adapters_resume_in_another_layout(work, adapted, megascale) -> None:
    data = [f"--data.train={work}/chat/train", f"--data.valid={work}/chat/valid", f"--train.runs={work}/runs"]
    options = data + OPTIONS + [start_from(work), FRESH] + LORA + ["--train.steps=6", "--lr.peak=3e-2"]
    options += ["--train.name=moved", "--train.micro_batch=1"]
    assert megascale("train", *options, "--train.stop_after=3").returncode == 0
    run = megascale("train", *options, "--parallel.tensor=2", "--parallel.pipeline=2")
    assert run.returncode == 0, run.stderr
    np.testing.assert_allclose(read_losses(work, "moved"), read_losses(work, "adapted"), rtol=1e-4)


def test_adapters_refuse_another_model_and_other_settings(work, fresh, adapted) -> None:
    options = [FRESH] + LORA + ["--train.steps=8", "--lr.peak=3e-2"]
    reordered = LORA[:2] + ["--train.lora.targets=mlp.out,mlp.gate,attention.query"]
    assert train(work, "adapted", start_from(work), FRESH, *reordered, "--train.steps=6", "--lr.peak=3e-2").finished
    with pytest.raises(DataError, match="were trained on a different model from that of step 2"):
        train(work, "adapted", start_from(work, "fresh"), "--checkpoint.start_step=2", *options)
    with pytest.raises(DataError, match=r"holds adapters \(alpha=6.0, rank=3.*restore \[train.lora\]"):
        train(work, "adapted", start_from(work), FRESH, "--train.lora.rank=4", "--train.steps=8")
    with pytest.raises(DataError, match="holds the whole model, and this start would train adapters"):
        train(work, "fresh", start_from(work), *options)
    with pytest.raises(DataError, match=r"holds adapters .* and no model; write the merged model"):
        train(work, "nested", start_from(work, "adapted"), FRESH)
    with pytest.raises(ConfigError, match="trains the whole model and has no adapters"):
        api.export_adapter(work / "runs" / "base", work / "none")


def test_exports_for_peft_and_merged_have_equal_logits(work, adapted) -> None:
    transformers = pytest.importorskip("transformers")
    api.export_model(work / "runs" / "base", work / "base-hf", tokenizer=False)
    api.export_model(adapted, work / "merged-hf", tokenizer=False)
    written = api.export_adapter(adapted, work / "adapter-hf")
    tensors = load_file(work / "adapter-hf" / "adapter_model.safetensors").values()
    assert written.parameters == sum(tensor.numel() for tensor in tensors)
    tokens = torch.arange(40).reshape(2, 20) * 7 % 290
    ours, _ = restore_model(adapted)
    with torch.no_grad():
        expected = ours.compute_logits(ours(tokens.t())).transpose(0, 1)
        merged = transformers.AutoModelForCausalLM.from_pretrained(work / "merged-hf")(tokens).logits
        base = transformers.AutoModelForCausalLM.from_pretrained(work / "base-hf")
        assert (base(tokens).logits - expected).abs().max() > 1e-2
        assert (merged - expected).abs().max() < 1e-4
        add_adapter(base, work / "adapter-hf")
        assert (base(tokens).logits - expected).abs().max() < 1e-4


def add_adapter(model: torch.nn.Module, folder: Path) -> None:
    """Add the adapters of a folder to a model as PEFT's documentation defines them."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    modules = dict(model.named_modules())
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            path = name.removesuffix(".lora_A.weight")
            module = modules[path.removeprefix("base_model.model.")]
            assert path.rpartition(".")[2] in config["target_modules"]
            change = config["lora_alpha"] / config["r"] * tensors[f"{path}.lora_B.weight"] @ a
            module.weight.data += change  # type: ignore[operator, union-attr]


def test_peft_loads_the_folder(work, adapted) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    if not (work / "adapter-hf").exists():
        api.export_model(work / "runs" / "base", work / "base-hf", tokenizer=False)
        api.export_adapter(adapted, work / "adapter-hf")
    base = transformers.AutoModelForCausalLM.from_pretrained(work / "base-hf")
    model = peft.PeftModel.from_pretrained(base, str(work / "adapter-hf"))
    ours, _ = restore_model(adapted)
    tokens = torch.arange(40).reshape(2, 20) * 7 % 290
    with torch.no_grad():
        expected = ours.compute_logits(ours(tokens.t())).transpose(0, 1)
        assert (model(tokens).logits - expected).abs().max() < 1e-4


def test_the_plan_has_the_memory_of_adapters() -> None:
    tree = {
        "model": {**MODEL, "vocab_size": 300},
        "train": {"micro_batch": 2, "global_batch": 2, "lora": {"rank": 8}, "precision": "bfloat16"},
    }
    config = from_tree(tree)
    layout = lay_out(config, 1)
    memory, _ = layout.stage_memory(0)
    engine = Engine(layout, None, torch.device("cpu"))
    weights = sum(parameter.numel() * 2 for parameter in engine.chunks[0].parameters())
    trained = sum(flat.numel() for flat in (state.master for state in engine.optimizer.states))
    assert memory.weights == weights
    padding = sum(flat.layout.size for flat in engine.buffers) / memory.gradients * 4
    assert 1 <= padding < 1.1
    assert memory.optimizer * padding == pytest.approx(4 * 3 * trained)
    plain = from_tree({**tree, "train": {**tree["train"], "lora": None}})
    assert lay_out(plain, 1).stage_memory(0)[0].gradients > 5 * memory.gradients


def test_an_8b_model_with_adapters_fits_one_gpu(megascale) -> None:
    arguments = ["--model.preset=llama-8b", "--model.layers=32", "--train.lora.rank=16", "--train.micro_batch=1"]
    arguments += ["--train.global_batch=8", "--train.precision=bfloat16", "--gpus", "1", "--device-gib", "80"]
    full_model = megascale("plan", *arguments[:2], *arguments[3:])
    assert full_model.returncode == 3
    plan = megascale("plan", *arguments)
    assert plan.returncode == 0, plan.stdout + plan.stderr


def test_a_conversation_from_the_command_line_and_in_a_loop(work, adapted, megascale, monkeypatch, capsys) -> None:
    run = megascale("generate", adapted, "--chat", "--prompt", "Who are you?", "--temperature", "0")
    assert run.returncode == 0, run.stderr
    assert run.stdout == "A small model.\n"
    refused = megascale("generate", adapted, "--system", "a")
    assert refused.returncode == 2
    refused = megascale("generate", adapted, "--chat", "--json")
    assert "--json prints one reply" in refused.stderr
    session = api.open_chat(work / "runs" / "base", temperature=0)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Say yes.\n\nWho are you?\n"))
    _talk(session)  # the end of the input is Ctrl-D
    assert capsys.readouterr().out.splitlines()[0] == "Yes!"
    assert [message["role"] for message in session.messages] == ["user", "assistant"] * 2

    def interrupt(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "input", interrupt)
    _talk(session)
    # An interrupted reply stays in the conversation as far as it was shown.
    pieces = session.reply("Say yes.")
    shown = "".join(itertools.islice(pieces, 1))
    pieces.close()
    assert session.messages[-1] == {"role": "assistant", "content": shown}


def test_a_run_without_a_template_cannot_talk(tiny, megascale, tmp_path) -> None:
    assert megascale("train", tiny, "--train.steps=1").returncode == 0
    run = megascale("generate", tmp_path / "runs" / "tiny", "--chat")
    assert run.returncode in (2, 4)
    assert "tokenizer" in run.stderr


def test_a_system_message_that_the_template_leaves_out_is_refused() -> None:
    """The conversation would go on without it."""
    chunk = Chunk(ModelConfig(layers=1, hidden=8, heads=1, vocab_size=300), range(1), is_first=True, is_last=True)
    tokenizer = train_tokenizer(["Be brief."], 300)
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    for condition, is_refused in (("", False), (" if m.role != 'system'", True)):
        template = ChatTemplate(source.replace(" %}<", f"{condition} %}}<"), {}, "template")
        for system in ("", "Be brief."):
            expectation: AbstractContextManager[Any] = nullcontext()
            if system and is_refused:
                expectation = pytest.raises(DataError, match=r"leaves out .* role system, so --system has no effect")
            with expectation:
                ChatSession(chunk, tokenizer, template, ends=set(), sampling=Sampling(), tokens=1, system=system)
