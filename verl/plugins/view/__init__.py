"""A run in the browser: ``verl view FOLDER...`` serves the page, ``verl report RUN`` writes a file to send.

::

    files of runs ──► discovery.py ──► index.py (SQLite) ──► curves.py, samples.py, tokens.py, timeline.py ──► server.py
                                                                                                              page/
"""
