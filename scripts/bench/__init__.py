"""Parts of the benchmarks. Those of ``bench_serving.py``, each of which can be used by itself:

``options`` (flags) → ``dataset`` (prompts) and ``arrivals`` (when each is sent) → ``run`` (sends them through
``client``, which notes in an ``outcome`` when each chunk came) → ``results`` (figures) → ``report``, ``plot``. ``cpu``
says what the server's processes used meanwhile.

Of ``bench_compare.py``: ``peers`` (other servers), ``outside`` (what is not the model's), ``comparison`` (ratios). Of
``bench_frontend.py``: ``stack`` (a server of ours), ``takers`` (its clients), ``costs``, ``floor``, ``step_lag``;
``capacity`` turns what that measures into cores.
"""
