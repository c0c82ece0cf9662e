package arriving

import "errors"

// ErrFrames says that a client cuts its messages into many small frames, each of which takes memory.
var ErrFrames = errors.New("arriving: frames are too small")
