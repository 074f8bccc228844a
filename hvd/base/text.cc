#include "hvd/base/text_definition.h"
