"""The exchange of tokens with the experts of other ranks in a dry run, which has no values to route by: every rank gets as many."""

from __future__ import annotations

from torch import Tensor

from hf_parallel.expert_parallel.exchange import Group, Journey
from hf_parallel.tensor_parallel.layout import split_units


class EvenJourney(Journey):
    """Rows that are shared out evenly over the ranks of a group, each of which has as many to send."""

    @classmethod
    def agree(cls, group: Group, sent: Tensor, hooks: int = 0) -> Journey:
        """Tell each rank how many rows it gets, and take no notice of it."""
        Journey.agree(group, sent, hooks)
        return cls(group, [], [])

    def there(self, rows: Tensor) -> Tensor:
        """`rows` f[n ...] sent; f[m ...], the same part of the rows of each rank."""
        sizes = split_units(len(rows), self.group.size(), 0)
        self.sent[:], self.arriving[:] = sizes, [sizes[self.group.rank()]] * self.group.size()
        return super().there(rows)
