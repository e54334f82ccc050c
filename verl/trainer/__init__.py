from verl.supervision.interruption import on_import

on_import(__name__)
