from verl.toolkit.names import DatasetPadMode as DatasetPadMode
