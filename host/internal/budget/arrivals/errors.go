package arrivals

import "errors"

var errFrames = errors.New("arrivals: frames are too small")
