"""Models of other toolkits become checkpoints: CTranslate2 folders, Argos packages, Hugging Face Marian folders.

``kinds.import_model`` is the way in. Each kind has a reader, which makes an ``Imported`` of a path. Nothing of another
toolkit is run or unpickled, and what cannot be read to its end leaves no file. What this package's model lacks is
refused by name, all reasons in one message.
"""
