#include "states.h"
