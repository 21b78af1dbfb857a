"""A folder of data that does not exist is named as that."""

import pytest

from megascale.config import DataConfig
from megascale.data.dataset.data_checks import check_data, check_entry
from megascale.errors import DataError


def test_a_missing_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"data\.train=none/train: the folder none does not exist"):
        check_entry("none/train")
    with pytest.raises(DataError, match=r"its folder none does not exist"):
        check_data(DataConfig(train="none/train"), 8, needs_tokenizer=False)


def test_a_missing_file_in_a_folder_is_not_called_a_folder(tmp_path):
    with pytest.raises(DataError, match=r"there is neither a file or folder of that name"):
        check_entry(f"{tmp_path}/train")
