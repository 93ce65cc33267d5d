"""The example that is not Criteo's: MovieLens in either of its public forms, to a prepared data set."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pa_parquet
import pytest

from bench.movielens_100k import GENRES
from rechpc.dataset import check_index, read_index
from rechpc.prepare.convert import prepare
from tests.configs import compose

ROOT = Path(__file__).resolve().parents[2]
RATINGS = [(1 + i % 7, 1 + i % 5, 1 + (i * 3) % 5, 880_000_000 + 7919 * i % 1000) for i in range(40)]
USERS = {user: (20 + user, "MF"[user % 2], ["student", "other"][user % 2], f"{user:05d}") for user in range(1, 8)}
ITEMS = {1: ["Action", "Film-Noir"], 2: ["Drama"], 3: ["unknown"], 4: ["Children's", "Comedy", "War"], 5: ["Western"]}


def recbole(path: Path) -> None:
    texts = {
        "inter": ["user_id:token\titem_id:token\trating:float\ttimestamp:float"],
        "user": ["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"],
        "item": ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"],
    }
    texts["inter"] += ["\t".join(map(str, rating)) for rating in RATINGS]
    texts["user"] += ["\t".join(map(str, [user, *facts])) for user, facts in USERS.items()]
    texts["item"] += [f'{item}\tA "film"\t{1990 + item}\t{" ".join(genres)}' for item, genres in ITEMS.items()]
    for name, lines in texts.items():
        (path / f"ml-100k.{name}").write_text("\n".join(lines) + "\n")


def grouplens(path: Path) -> None:
    (path / "u.data").write_text("".join("\t".join(map(str, rating)) + "\n" for rating in RATINGS))
    (path / "u.user").write_text("".join("|".join(map(str, [user, *facts])) + "\n" for user, facts in USERS.items()))
    items = [
        f"{item}|Le caf\xe9|01-Jan-{1990 + item}||http://x|" + "|".join(str(int(g in genres)) for g in GENRES) + "\n"
        for item, genres in ITEMS.items()
    ]
    (path / "u.item").write_text("".join(items), encoding="latin-1")


def parquet(path: Path, form, *arguments: str) -> Path:
    (path / "raw").mkdir(parents=True)
    form(path / "raw")
    command = [sys.executable, str(ROOT / "bench/movielens_100k.py"), str(path / "raw"), str(path / "parquet")]
    subprocess.run([*command, *arguments], check=True, capture_output=True, timeout=120)
    return path / "parquet"


def rows(path: Path) -> list[list[dict]]:
    return [pa_parquet.read_table(path / f"{split}.parquet").to_pylist() for split in ("train", "val", "test")]


@pytest.mark.parametrize("split", ["random", "time"])
def test_both_public_forms_give_the_same_samples(split: str, tmp_path: Path) -> None:
    made = [rows(parquet(tmp_path / form.__name__, form, "--split", split)) for form in (recbole, grouplens)]

    assert made[0] == made[1]
    assert [len(part) for part in made[0]] == [32, 4, 4]
    everything = [row for part in made[0] for row in part]
    found = sorted((row["user_id"], row["item_id"], row["label"], row["timestamp"]) for row in everything)
    assert found == sorted((user, item, int(stars >= 4), at_s) for user, item, stars, at_s in RATINGS)
    assert all(row["genres"] == ITEMS[row["item_id"]] for row in everything)
    assert all(row["occupation"] == USERS[row["user_id"]][2] for row in everything)
    times = [row["timestamp"] for row in everything]
    assert (times == sorted(times)) == (split == "time")


def test_the_experiment_reads_them(tmp_path: Path) -> None:
    source = parquet(tmp_path, recbole)
    data = compose("experiment=movielens_100k", f"data.source={source}", f"data.path={tmp_path / 'out'}").data

    prepare(data)

    index = read_index(tmp_path / "out")
    check_index(index, data)
    test = pa.ipc.open_file(tmp_path / "out/test-00000.arrow").read_all().to_pylist()
    assert [row["item_id"] for row in test] == [row["item_id"] for row in rows(source)[2]]
    assert [len(row["genres"]) for row in test] == [len(row["genres"]) for row in rows(source)[2]]
    assert index.vocabularies["t_gender"].rows == 2
