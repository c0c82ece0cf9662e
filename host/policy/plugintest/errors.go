package plugintest

import "errors"

// errUnread ends a measurement of a policy that cannot read its own paths back. [Check] says more.
var errUnread = errors.New("plugintest: a path of the policy's own does not read back")
