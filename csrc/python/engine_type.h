/* engine_type.h: class Engine, for the module that holds it. Include after Python.h. */
#ifndef AGC_ENGINE_TYPE_H
#define AGC_ENGINE_TYPE_H

extern PyType_Spec agc_engine_type_spec;

#endif /* AGC_ENGINE_TYPE_H */
