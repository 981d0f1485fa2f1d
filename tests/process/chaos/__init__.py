"""Chaos: a real server, a crowd of clients that know what they have to get, and everything that can go wrong.

    options.py     what a run is told
    plan.py        who is hurt when, drawn from the seed before it begins
    texts.py       what the scripted model says: text that is hard to cut
    model.py       tokenizer, chat template and scripts of one format
    templates.py   the requests that the clients choose from
    merged.py      a response -> what must not depend on where its chunks end
    difference.py  expected and received -> lost, repeated, changed bytes
    tally.py       what is counted
    stage.py       what all who act share: the server's address, what is expected, the tally
    clients.py     the crowd
    stallers.py    clients that never read
    floods.py      more requests than the server takes
    http_garbage.py, frame_garbage.py   nonsense for the routes and for the sockets between the processes
    disturber.py   signals to the processes, as planned
    processes.py   the server's processes and files, seen from outside
    leaks.py       what a run has left behind
    round.py       one server, from its start to its end
    report.py      the result, for a person and for a program

``scripts/chaos.py`` is the command.
"""
