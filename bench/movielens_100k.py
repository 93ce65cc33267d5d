"""MovieLens-100K as Parquet with a train, a val and a test split, for conf/data/movielens_100k.yaml.

  python bench/movielens_100k.py DIR OUT [--split time]
  python -m rechpc.prepare experiment=movielens_100k data.source=OUT data.path=data/movielens
  python -m rechpc.submit  experiment=movielens_100k data.path=data/movielens

DIR holds ml-100k.inter, .user and .item (RecBole's wheel has them under recbole/dataset_example/ml-100k), or u.data,
u.user and u.item of GroupLens' own archive, whose licence is research only. A sample is a rating; its label is 1 for
4 or 5 stars. --split says which tenths are val and test: a random choice (the default), or the newest ratings, which
is harder by about 0.08 of AUC, for some of their users and films are new.
"""

import argparse
from pathlib import Path

import polars as pl

_GENRES = (
    "unknown Action Adventure Animation Children's Comedy Crime Documentary Drama Fantasy Film-Noir Horror Musical "
    "Mystery Romance Sci-Fi Thriller War Western"
)
GENRES = _GENRES.split()
RATINGS = ("user_id", "item_id", "rating", "timestamp")
USERS = ("user_id", "age", "gender", "occupation", "zip_code")


def read(folder: Path) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Ratings, users and items; genres as a list of words."""
    text = {"infer_schema": False, "quote_char": None}
    if (folder / "ml-100k.inter").exists():
        parts = [pl.read_csv(folder / f"ml-100k.{part}", separator="\t", **text) for part in ("inter", "user", "item")]
        ratings, users, items = (part.rename(lambda name: name.partition(":")[0]) for part in parts)
        return ratings, users, items.with_columns(genres=pl.col("class").str.split(" "))
    ratings = pl.read_csv(folder / "u.data", separator="\t", has_header=False, new_columns=RATINGS, **text)
    users = pl.read_csv(folder / "u.user", separator="|", has_header=False, new_columns=USERS, **text)
    columns = ["item_id", "movie_title", "release_date", "video", "url", *GENRES]
    raw = (folder / "u.item").read_text(encoding="latin-1").encode()
    items = pl.read_csv(raw, separator="|", has_header=False, new_columns=columns, **text)
    genres = pl.concat_list(pl.when(pl.col(name) == "1").then(pl.lit(name)) for name in GENRES).list.drop_nulls()
    return ratings, users, items.with_columns(genres=genres, release_year=pl.col("release_date").str.tail(4))


def main() -> None:
    """Join, label, split and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--split", choices=["random", "time"], default="random")
    arguments = parser.parse_args()
    ratings, users, items = read(arguments.dir)
    whole = ratings.join(users, on="user_id", maintain_order="left").join(items, on="item_id", maintain_order="left")
    whole = whole.select(
        label=(pl.col("rating").cast(pl.Float64) >= 4).cast(pl.Int8),
        age=pl.col("age").cast(pl.Float32),
        release_year=pl.col("release_year").cast(pl.Float32, strict=False),  # one film has none
        user_id=pl.col("user_id").cast(pl.Int32),
        item_id=pl.col("item_id").cast(pl.Int32),
        gender="gender",
        occupation="occupation",
        zip_code="zip_code",
        genres="genres",
        timestamp=pl.col("timestamp").cast(pl.Int64),
    )
    whole = whole.sort("timestamp", maintain_order=True)
    if arguments.split == "random":
        whole = whole.sample(fraction=1, shuffle=True, seed=0)
    arguments.out.mkdir(parents=True, exist_ok=True)
    n = len(whole)
    for split, start, end in (("train", 0, 8), ("val", 8, 9), ("test", 9, 10)):
        part = whole[n * start // 10 : n * end // 10]
        part.write_parquet(arguments.out / f"{split}.parquet")
        print(f"{split:5} {len(part):,} ratings, {part['label'].mean():.1%} of 4 or 5 stars")


if __name__ == "__main__":
    main()
