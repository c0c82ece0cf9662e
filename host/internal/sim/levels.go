package sim

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store"
)

// maxLevels is how many levels a host may have.
const maxLevels = 8

// Level is one level of a simulated host: a root's capacity, and how fast it loads. The first is the nearest.
type Level struct {
	Capacity       Capacity
	BytesPerSecond float64
	Latency        time.Duration // until the first byte of what a request loads from it
	Policy         *Policy       // evicts there, whatever evicts in the other levels; nil: the policy that is compared
}

// seconds is what so many bytes take.
func (l *Level) seconds(bytes int64) float64 {
	return l.Latency.Seconds() + float64(bytes)/l.BytesPerSecond
}

// ParseLevels reads capacities and speeds such as "0=1%" and "0=50" or "0=50:30ms", the latter in GB/s and with a latency. Each level
// has both.
func ParseLevels(capacities, costs []string) ([]Level, error) {
	texts, err := byLevel(capacities, "1=10%")
	if err != nil {
		return nil, err
	}
	speeds, err := byLevel(costs, "1=5")
	if err != nil {
		return nil, err
	}
	levels := make([]Level, len(texts))
	for n := range levels {
		text, ok := texts[n]
		if !ok {
			return nil, fmt.Errorf("%w: there is no level %d: want levels without gaps, from 0 on", ErrLevel, n)
		}
		if levels[n].Capacity, err = ParseCapacity(text); err != nil {
			return nil, err
		}
		if speeds[n] == "" {
			return nil, fmt.Errorf("%w: no speed of level %d: want one in GB/s for each level, such as --cost 0=50,1=5", ErrLevel, n)
		}
		rate, latency, _ := strings.Cut(speeds[n], ":")
		speed, err := strconv.ParseFloat(rate, 64)
		if latency != "" && err == nil {
			levels[n].Latency, err = time.ParseDuration(latency)
		}
		if err != nil || levels[n].Latency < 0 || !(speed > 0) || math.IsInf(speed, 0) {
			return nil, fmt.Errorf("%w: level %d loads at %q GB/s, want a number above 0, and perhaps a latency as in 1:30ms", ErrLevel, n, speeds[n])
		}
		levels[n].BytesPerSecond = speed * 1e9
	}
	for n := range speeds {
		if n >= len(levels) {
			return nil, fmt.Errorf("%w: a speed for level %d, which has no capacity", ErrLevel, n)
		}
	}
	return levels, nil
}

// byLevel splits "0=a", "1=b".
func byLevel(list []string, example string) (map[int]string, error) {
	texts := map[int]string{}
	for _, item := range list {
		n, text, err := OfLevel(item, example)
		if err != nil {
			return nil, err
		}
		if _, twice := texts[n]; twice {
			return nil, fmt.Errorf("%w: level %d twice", ErrLevel, n)
		}
		texts[n] = text
	}
	return texts, nil
}

// OfLevel splits "LEVEL=TEXT"; example is one, for an error.
func OfLevel(item, example string) (n int, text string, err error) {
	number, text, ok := strings.Cut(item, "=")
	if n, err = strconv.Atoi(number); !ok || err != nil || n < 0 || n >= maxLevels {
		return 0, "", fmt.Errorf("%w: %q: want a level from 0 to %d and what it has, such as %s", ErrLevel, item,
			maxLevels-1, example)
	}
	return n, text, nil
}

// writes are the names of the values of [store.Write].
var writes = []string{"back", "hits", "through"}

// ParseWrite parses when the next level gets what is new.
func ParseWrite(s string) (store.Write, error) {
	if n := slices.Index(writes, s); n >= 0 {
		return store.Write(n), nil
	}
	return 0, fmt.Errorf("%w: write %q (back, hits, through)", ErrLevel, s)
}

// What is stored and what moves between levels, where no module decides it.
const (
	AdmitDefault = "default" // the host's own rule
	AdmitAll     = "all"     // all demotions, and promotion at the first load, as by a policy that knows nothing of levels
)

// OpenAdmission opens AdmitDefault, AdmitAll, or a policy of such a role as [OpenPolicy] does. One that places makes roots of the
// levels, among which it chooses.
func OpenAdmission(ctx context.Context, text string, opt policy.Options, roles ...abi.Role) (*Policy, error) {
	switch text {
	case AdmitDefault:
		return &Policy{Text: text, Label: text}, nil
	case AdmitAll:
		return &Policy{Text: text, Label: text, module: policy.NativeModule(text, []abi.Role{abi.RoleAdmit}, func(guest.Info) (any, error) {
			return admitsAll{}, nil
		})}, nil
	}
	return open(ctx, text, opt, roles...)
}

type admitsAll struct{}

func (admitsAll) Admit(batch []abi.Candidate, dst []bool) {
	for i := range batch {
		dst[i] = true
	}
}
