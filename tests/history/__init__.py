"""Is there an order of these concurrent calls that explains all their answers? A checker of linearizability.

Clients record each call with its start, its end and its answer. `check` then asks, of each object (a counter, a key)
by itself, whether the calls can be put in an order in which each takes effect at one moment between its start and its
end, and in which a model of the object, one call after the other, gives the very answers that came. If not, no server
that does what the model does can have given them: the Violation says where the explanation ends.

    recorder = Recorder(path, client=7)         # one for each connection; files may be shared within a process
    token = recorder.start(Acquire("a", 1, 3))  # written before the request leaves
    recorder.end(token, (0, 1))                 # written when the answer is there
    recorder.closing(); ...; recorder.closed()  # also by somebody else, for a client that was killed
    violation = check(load(paths), CounterModel())
    assert violation is None, violation

What has no answer may have taken effect at any moment after its start and before its connection's end, or never. The
end of a connection is a call too, `Closed`: with it the server takes back what the connection holds, and nothing of
that connection takes effect afterwards. It starts when the peer may first have begun to go, and ends when the server
was seen to have let go of everything. Without an end it may happen at any time, or never.

What makes a history hard is not its length but how many calls of one object are under way at once: up to some ten are
checked as fast as they are read, with twenty and unanswered ones among them it may end as Undecided, which is no pass.
So let many clients share several objects.

A model of something else is a `Model` with three methods: `key` of a call, the `initial` state, and `step`, which
says what a call with that answer can leave behind. States and calls are hashable values; the smaller the better.
Two more make the search quick, and a third the report readable: `observes`, `alike`, `describe`. An object whose calls
concern several things at once has `parts`.

operations.py says what a history is, model.py what a model, search.py has the algorithm, report.py what is told of a
history that has no explanation, recording.py the files. counter.py, takes.py, throttr.py, beanstalk.py and sentinel.py
are models, the last with leases.py and windows.py. waiting.py has what is to be said of waits, without a search, and
resumptions.py of connections that are resumed. loans.py has the counters that jobs share with clients.
smockron.py is no model: it has bounds in place of a search. crowd.py, takers.py and borrowers.py make histories.
"""

from history.model import Model
from history.operations import Closed, Operation
from history.recording import Recorder, load
from history.report import Violation
from history.search import Undecided, check

__all__ = ["Closed", "Model", "Operation", "Recorder", "Undecided", "Violation", "check", "load"]
