"""A training step in each worker of a DataLoader: ``workers_of_a_loader.py fork|spawn``."""

from __future__ import annotations

import sys

from torch.utils.data import DataLoader, Dataset
from training import train


class Steps(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return train()


if __name__ == "__main__":
    for hits in DataLoader(Steps(), batch_size=None, num_workers=1, multiprocessing_context=sys.argv[1]):
        print("hits:", int(hits))
