/* Choice of kernels at run time. */
#pragma once

#include "kernels.h"

namespace nf4 {

/* The kernels in use; the first call picks the best set this CPU runs. */
const Kernels* active_kernels();

/* Switches to the named set; false, and no change, where this CPU cannot run it. */
bool select_kernels(const char* name);

}  // namespace nf4
