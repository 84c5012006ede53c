"""Data sets in the layouts of Hugging Face's hub, and what the datasets library reads of them.

Writes golden/hub/: a folder for each layout, with a few short texts of our own, and hub.json with the texts of every split of
every configuration. Needs pyarrow and datasets.
"""
import json
import os
import pathlib
import shutil

import pyarrow as pa
import pyarrow.parquet as pq

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_CACHE"] = "/tmp/hub-oracle"
import datasets  # noqa: E402

datasets.disable_progress_bars()
GOLDEN = pathlib.Path(__file__).parent / "golden" / "hub"
CARD = "---\nlicense: cc0-1.0\n{}---\n\n# Texts\n\nNot a document.\n"


def texts(name, count=2):
    return [f"text {number} of {name}" for number in range(count)]


def parquet(path, name, count=2):
    """Between two other columns, of which one is of structs."""
    own = texts(name, count)
    table = pa.table({"id": list(range(count)), "text": own, "meta": [{"source": "ours", "tags": ["a"]}] * count})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, compression="zstd", use_dictionary=False, write_statistics=False, store_schema=False)


def jsonl(path, name, count=2):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts(name, count))))


def sharded(folder):
    for shard in range(2):
        parquet(folder / f"data/train-0000{shard}-of-00002.parquet", f"train shard {shard}")
    parquet(folder / "data/validation-00000-of-00001.parquet", "validation")
    parquet(folder / "data/test_sft-00000-of-00001-0123456789abcdef.parquet", "test_sft")
    (folder / "README.md").write_text(CARD.format(""))
    (folder / "dataset_infos.json").write_text("{}\n")


def configured(folder):
    for language in ("en", "de"):
        parquet(folder / f"{language}/train-00000-of-00001.parquet", f"{language} train")
        parquet(folder / f"{language}/held-00000-of-00001.parquet", f"{language} held")
    parquet(folder / "extra/more.parquet", "more")
    (folder / "LICENSE").write_text("Anybody may do anything.\n")
    card = """configs:
- config_name: en
  default: true
  data_files:
  - split: train
    path: en/train-*
  - split: held
    path: en/held-*
- config_name: de
  data_files:
  - split: train
    path:
    - "de/train-00000-of-00001.parquet"
  - split: held
    path: "de/held-*.parquet"
- config_name: more
  data_files: "extra/*.parquet"
- config_name: folder
  data_dir: de
"""
    (folder / "README.md").write_text(CARD.format(card))


def file_names(folder):
    for name in ("train", "dev", "test"):
        jsonl(folder / f"{name}.jsonl", name)
    jsonl(folder / "my-train-part2.jsonl", "part 2")
    (folder / "README.md").write_text(CARD.format("language:\n- en\n"))


def folder_names(folder):
    jsonl(folder / "train/a.jsonl", "train a")
    jsonl(folder / "train/deep/b.jsonl", "train b")
    jsonl(folder / "valid_1/c.jsonl", "valid")
    jsonl(folder / "evaluation/d.jsonl", "evaluation")
    jsonl(folder / "other/e.jsonl", "other")
    (folder / "README.md").write_text(CARD.format(""))


def no_names(folder):
    jsonl(folder / "a.jsonl", "a")
    jsonl(folder / "trained/b.jsonl", "b")
    (folder / "README.md").write_text(CARD.format(""))


def converted(folder):
    """As the hub's branch of converted files is: a folder for each configuration, and no card."""
    for language in ("en", "de"):
        parquet(folder / f"{language}/train/0000.parquet", f"{language} train")
        parquet(folder / f"{language}/test/0000.parquet", f"{language} test")


def main():
    shutil.rmtree(GOLDEN, ignore_errors=True)
    told = {}
    for layout in (sharded, configured, file_names, folder_names, no_names, converted):
        folder = GOLDEN / layout.__name__
        folder.mkdir(parents=True)
        layout(folder)
        if layout is converted:
            found = {name: datasets.load_dataset(str(folder), data_dir=name) for name in ("en", "de")}
        else:
            names = datasets.get_dataset_config_names(str(folder))
            found = {name: datasets.load_dataset(str(folder), name) for name in names}
        told[layout.__name__] = {
            name: {split: list(rows["text"]) for split, rows in splits.items()} for name, splits in found.items()
        }
    # A column of conversations, as chat data sets have it.
    message = pa.struct([("content", pa.string()), ("role", pa.string()), ("name", pa.string())])
    chats = json.loads((GOLDEN.parent / "chat" / "chat.json").read_text())["conversations"]
    rows = [[{**turn, "name": None} for turn in chat] for chat in chats.values()]
    table = pa.table({"prompt": ["unused"] * len(rows), "messages": pa.array(rows, pa.list_(message))})
    folder = GOLDEN / "chats" / "data"
    folder.mkdir(parents=True)
    for split, part in (("train_sft", table), ("test_sft", table.slice(0, 1))):
        pq.write_table(part, folder / f"{split}-00000-of-00001.parquet", compression="zstd", store_schema=False)
    (GOLDEN / "hub.json").write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")


main()
