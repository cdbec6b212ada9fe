"""The settings of `tandem up`, and their names in LMI, SageMaker, TGI and vLLM."""
