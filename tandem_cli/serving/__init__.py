"""Low-code configuration: `tandem up` accepts the configuration of LMI, SageMaker and TGI.

serving.properties ─▶ OPTION_* and SERVING_* ─▶ variables of TGI and SageMaker     the first source that sets a key wins
    ─▶ knobs.py maps each key to settings of services
    ─▶ flags of `tandem up`, under its own flags and TANDEM_* variables
"""

from tandem_cli.serving.resolve import LowCode, read_low_code

__all__ = ["LowCode", "read_low_code"]
