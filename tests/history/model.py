"""What the checker has to know of the objects: how they behave when calls come one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from history.operations import Operation

WHOLE: frozenset[Any] = frozenset((None,))


class Model:
    """The rules of one object. `key`, `initial` and `step` are the model; the other methods make the search quick, or
    the report plain.

    A state is a hashable value, and equal to another if and only if everything that follows is the same.
    """

    def key(self, call: Any) -> Hashable:
        """The object that the call concerns. Objects must not influence each other."""
        raise NotImplementedError

    def parts(self, operation: Operation) -> frozenset[Any]:
        """The parts of the object that the call reads or changes: calls that share none do not influence each other."""
        del operation
        return WHOLE

    def leaves(self, operation: Operation) -> frozenset[Any]:
        """The parts for which the end of the connection matters, because the operation may leave something there, or
        take effect late.
        """
        return self.parts(operation)

    def initial(self) -> Hashable:
        """The state of an object before the first call."""
        raise NotImplementedError

    def step(self, state: Any, operation: Operation) -> Iterable[Hashable]:
        """The states that the operation may leave, taking effect in this one; none if it cannot, with that answer.

        An operation without an answer (it is None) takes effect here, with whatever answer that would have had; that
        it may do nothing at all is the checker's business. Its `ended` is the moment when its connection's end was
        seen, or None. Also for `Closed`, which must always be possible.
        """
        raise NotImplementedError

    def observes(self, operation: Operation) -> bool:
        """Whether an operation with that answer leaves each state in which it is possible as it is. Not for Closed."""
        del operation
        return False

    def clears(self, operation: Operation) -> bool:
        """Whether an operation does at most what the end of its connection does: takes from its client what it has.

        What a client has has to come by its own calls alone.
        """
        del operation
        return False

    def alike(self, operation: Operation) -> Hashable | None:
        """Equal for operations of different clients that nobody but these two clients could tell apart.

        If equal ones of two clients take effect in turn, either order has to be possible and to leave the same, if the
        clients do nothing else meanwhile; and whatever others do between the two has to be the same in either order.
        None for an operation that has no equal.
        """
        del operation

    def describe(self, state: Any) -> str:
        """The state as the report shows it."""
        return repr(state)
