"""Names on the hub, and which files of a repository they mean."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from hetrun.errors import OptionError, UserError
from hetrun.loader.hub.names import RepositoryModel, is_on_the_hub, wanted
from hetrun.loader.hub.select import RepositoryFile, choose, type_of


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("hf:a/b", RepositoryModel("a/b")),
        ("a/b", RepositoryModel("a/b")),
        ("hf:a/b:Q4_K_M", RepositoryModel("a/b", "Q4_K_M")),
        ("hf:a/b@v1:x.gguf", RepositoryModel("a/b", "x.gguf", "v1")),
        ("hf:a/b@refs/pr/1", RepositoryModel("a/b", "", "refs/pr/1")),
        ("hf.co/a/b:q8_0", RepositoryModel("a/b", "q8_0")),
        ("https://huggingface.co/a/b", RepositoryModel("a/b")),
        ("https:/huggingface.co/a/b/", RepositoryModel("a/b")),
        ("https://huggingface.co/a/b/blob/main/x-Q8_0.gguf?x=1", RepositoryModel("a/b", "x-Q8_0.gguf")),
        ("https://huggingface.co/a/b/resolve/v1/d/x%20y.gguf", RepositoryModel("a/b", "d/x y.gguf", "v1")),
        ("https://huggingface.co/a/b/tree/main", RepositoryModel("a/b")),
    ],
)
def test_names(name: str, means: RepositoryModel) -> None:
    assert wanted(name) == means
    if " " not in means.name:
        assert wanted(means.name) == means
    assert is_on_the_hub(means.name)


@pytest.mark.parametrize(
    "name", ["hf:", "hf:a", "hf:a/b/c", "hf:../b", "hf:a/b:", "hf:a/b@", "a b/c", "hf:a/b@../x"]
)
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(OptionError, match="is not a valid name on the hub: it must be like"):
        wanted(name)


@given(st.text(max_size=30))
def test_no_name_does_harm(text: str) -> None:
    try:
        found = wanted(f"hf:{text}")
    except OptionError:
        return
    assert ".." not in found.repo + found.revision
    assert found.repo.count("/") == 1


FILES = [
    *("README.md", "config.json", "mmproj-F16.gguf", "m-imatrix.gguf"),
    *("m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf", "m-BF16-00001-of-00002.gguf"),
    *("m-BF16-00002-of-00002.gguf", "Q2_K/m-Q2_K-00001-of-00003.gguf", "Q2_K/m-Q2_K-00003-of-00003.gguf"),
]


def chosen(which: str, names: list[str]) -> list[str]:
    return [
        file.name
        for file in choose([RepositoryFile(name, 1) for name in names], RepositoryModel("a/b", which)).files
    ]


@pytest.mark.parametrize(
    ("which", "files"),
    [
        ("", ["m-Q4_K_M.gguf"]),
        ("q8_0", ["m-Q8_0.gguf"]),
        ("UD-Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        ("bf16", ["m-BF16-00001-of-00002.gguf", "m-BF16-00002-of-00002.gguf"]),
        ("m-BF16-00002-of-00002.gguf", ["m-BF16-00001-of-00002.gguf", "m-BF16-00002-of-00002.gguf"]),
        ("m-Q8_0.gguf", ["m-Q8_0.gguf"]),
        ("M-q8_0", ["m-Q8_0.gguf"]),
    ],
)
def test_which_files_are_meant(which: str, files: list[str]) -> None:
    assert chosen(which, FILES) == files


def test_without_the_usual_type_the_next_is_taken() -> None:
    assert chosen("", ["x.Q8_0.gguf", "x.Q5_K_M.gguf", "x.Q2_K.gguf"]) == ["x.Q5_K_M.gguf"]
    assert chosen("", ["z.gguf", "aa.gguf"]) == ["z.gguf"]


def test_what_is_not_there_is_said_with_what_is() -> None:
    with pytest.raises(UserError, match="there is no Q3_K_S; it has BF16, Q4_K_M, Q8_0, UD-Q4_K_XL"):
        chosen("Q3_K_S", FILES)
    with pytest.raises(UserError, match="there is no Q2_K; "):  # a part is missing
        chosen("Q2_K", FILES)
    with pytest.raises(UserError, match="no model that hetrun reads"):
        chosen("", ["README.md", "model.bin"])


def test_folders_of_safetensors() -> None:
    names = ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "README.md", "x.bin"]
    names += ["model-00002-of-00002.safetensors", "model.safetensors.index.json", "consolidated.safetensors"]
    assert sorted(chosen("", names)) == sorted(
        name for name in names if name not in ("README.md", "x.bin", "consolidated.safetensors")
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen3-8B-Q4_K_M", "Q4_K_M"),
        ("m.i1-IQ2_XXS", "IQ2_XXS"),
        ("a/BF16/m-BF16-00001-of-00002", "BF16"),
        ("gpt-oss-20b-mxfp4", "MXFP4"),
        ("Q-model", ""),
    ],
)
def test_types_by_names(name: str, kind: str) -> None:
    assert type_of(name) == kind
