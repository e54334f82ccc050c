"""Earlier public path of :mod:`verl.trainer.main_async`: sampling on other ranks, one step ahead of training."""

from verl.trainer.main_async import one_step_off as main

if __name__ == "__main__":
    main()
