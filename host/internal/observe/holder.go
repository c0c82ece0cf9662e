package observe

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Holder describes the process that listens on a port in use. /proc shows processes of this user, and for root those of all
// users.
func Holder(addr string, err error) string {
	_, text, split := net.SplitHostPort(addr)
	port, parse := strconv.Atoi(text)
	if errors.Join(split, parse) != nil || !errors.Is(err, unix.EADDRINUSE) {
		return ""
	}
	const listening = "0A"
	var sockets []string // in the form of the links of descriptors
	for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		b, _ := os.ReadFile(table) // without IPv6 the table of IPv6 is missing
		for line := range strings.Lines(string(b)) {
			if f := strings.Fields(line); len(f) > 9 && f[3] == listening && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) {
				sockets = append(sockets, "socket:["+f[9]+"]")
			}
		}
	}
	descriptors, _ := filepath.Glob("/proc/[0-9]*/fd/*") // cannot fail: the pattern is valid
	for _, fd := range descriptors {
		if to, err := os.Readlink(fd); err == nil && slices.Contains(sockets, to) {
			return " by process " + strings.Split(fd, "/")[2]
		}
	}
	return fmt.Sprintf(" by a process of another user: as root, `ss -ltnp 'sport = :%d'` names it", port)
}
