"""Features beside the core: each package here can be removed, and everything that does not name it still works.

A plug-in imports the core. The core never imports a plug-in: it loads one by its address, where a setting or a command
names it (:mod:`verl.base.plugins`).
"""
