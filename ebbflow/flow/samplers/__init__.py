"""The samplers that a recipe can name, one file each: ``sampler.name`` is the name of the file,
and its ``SAMPLER`` is an ``ebbflow.flow.sampler.Sampler``. A new sampler is one file here; no list
of names has to follow.

============  =========================================  =====================  ===========
sampler       a                                          b                      default eta
============  =========================================  =====================  ===========
``ode``       sigma'                                     0                      --
``flow_sde``  sigma' - s^2 |dt| / (2 sigma)              s sqrt|dt|             .7
``dance_sde`` sigma' - s^2 |dt| / (2 sigma)              s sqrt|dt|             .3
``cps``       sqrt(sigma'^2 - b^2)                       sigma' sin(eta pi/2)   .8
============  =========================================  =====================  ===========

a and b are those of ``ebbflow.flow.sampler``; ``dpm_solver`` and ``unipc`` are multistep solvers
and have none. Reading a recipe imports these files, so they import torch for type checking only.
"""
