package doctor

// Report is what follows from the facts.
type Report struct {
	Version  string    `json:"version"`
	Wanted   Wanted    `json:"wanted"`
	Facts    Facts     `json:"facts"`
	Verdicts []Verdict `json:"verdicts"`
	Findings []Finding `json:"findings"`
	Memory   []VRAM    `json:"gpu_memory"`
}

// Verdict is the path of the bytes between one memory and one root.
type Verdict struct {
	GPU   string `json:"gpu"` // UUID; empty: host memory
	Root  string `json:"root"`
	Route string `json:"route"` // RouteStaged, RouteDirect, RouteNone
	Why   string `json:"why"`
	Fix   string `json:"fix,omitempty"` // what would make it better
}

// Routes of a verdict.
const (
	RouteStaged = "staged"
	RouteDirect = "direct"
	RouteNone   = "none"
)

// Finding is something to know of.
type Finding struct {
	Level Level  `json:"level"`
	About string `json:"about"`
	Says  string `json:"says"`
	Fix   string `json:"fix,omitempty"`
}

// Level says how bad a finding is.
type Level string

const (
	Note    Level = "note"
	Warning Level = "warning"
	Problem Level = "problem" // what is configured cannot work
)

// VRAM is what kvhost takes of a GPU's memory, and what a serving engine may be given beside it.
type VRAM struct {
	GPU         string  `json:"gpu"`
	Bytes       int64   `json:"bytes"`
	Takes       int64   `json:"takes_bytes"`
	Utilization float64 `json:"gpu_memory_utilization"` // at most, for an engine that takes a share of the whole
}

// Problems is ErrProblems when something configured cannot work.
func (r *Report) Problems() error {
	for _, f := range r.Findings {
		if f.Level == Problem {
			return ErrProblems
		}
	}
	return nil
}
