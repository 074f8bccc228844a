#include "hvd/text_definition.h"
