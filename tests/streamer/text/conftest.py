"""The small tokenizer of the text tests."""

import pytest

from streamer.text.tokenizer import Tokenizer
from tests.tokenizers import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """512 ranks and 256 reserved ids: [EOS] 513, end_of_msg 514, open 515, close 516, sep 517."""
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return Tokenizer.from_directories([directory], 768)
