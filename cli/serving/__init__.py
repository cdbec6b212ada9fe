"""Low-code configuration: what users of LMI, SageMaker and TGI have already, understood by `tandem up`.

serving.properties ─▶ OPTION_* and SERVING_* ─▶ TGI's and SageMaker's names     the first that sets a key wins
    ─▶ knobs.py says which settings of which services a key means
    ─▶ flags of `tandem up`, under its own flags and TANDEM_* variables
"""

from cli.serving.resolve import LowCode, read_low_code

__all__ = ["LowCode", "read_low_code"]
