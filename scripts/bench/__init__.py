"""Parts of the benchmarks. Those of ``bench_serving.py``, each of which can be used by itself:

``options`` (flags) → ``dataset`` (prompts) and ``arrivals`` (when each is sent) → ``run`` (sends them through
``client``, which notes in an ``outcome`` when each chunk came) → ``results`` (figures) → ``report``, ``plot``. ``cpu``
says what the server's processes used meanwhile.
"""
