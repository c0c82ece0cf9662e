package sandbox

import (
	"sync"
	"time"
)

// LogMessage is the message of every line that a guest logs. The text of the line is an attribute: a guest cannot
// pretend to be the host.
const LogMessage = "policy log"

// logLimit limits a module to logBurst lines per second, over all its instances.
type logLimit struct {
	mu      sync.Mutex
	second  time.Time
	lines   int
	dropped int
}

// take asks for one line. dropped is the number of lines refused in the previous second, reported once.
func (l *logLimit) take(now time.Time) (dropped int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Sub(l.second) >= time.Second {
		dropped = l.dropped
		l.second, l.lines, l.dropped = now, 0, 0
	}
	if l.lines++; l.lines > logBurst {
		l.dropped++
		return 0, false
	}
	return dropped, true
}
