package crashfs

import (
	"fmt"

	"github.com/kvhost/kvhost/staging/faultfs"
)

// ErrPowerLost is returned by every operation after [FS.PowerLoss]. It wraps [faultfs.ErrInjected].
var ErrPowerLost = fmt.Errorf("crashfs: power lost (%w)", faultfs.ErrInjected)
