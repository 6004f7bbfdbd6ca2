"""Datasets: the tables of many ranks as Parquet files, which any engine can ask."""
