package doctor

import "github.com/kvhost/kvhost/host/internal/config"

// Report is the result of a check.
type Report struct {
	Version  string    `json:"version"`
	Facts    Facts     `json:"facts"`
	Verdicts []Verdict `json:"verdicts"`
	Findings []Finding `json:"findings"`
	Memory   []VRAM    `json:"gpu_memory"`

	config *config.Config // judged configuration
}

// Verdict is the route between the memory of a GPU or of the host and a root.
type Verdict struct {
	GPU   string `json:"gpu"` // UUID; empty for host memory
	Root  string `json:"root"`
	Route string `json:"route"` // RouteStaged, RouteDirect, RouteMemory, RouteNone
	Why   string `json:"why"`
	Fix   string `json:"fix,omitempty"` // advice for a better route
}

// Routes of a verdict.
const (
	RouteStaged = config.RouteStaged
	RouteDirect = config.RouteDirect
	RouteMemory = "memory"
	RouteNone   = "none"
)

// Finding is a note, a warning or a problem.
type Finding struct {
	Level Level  `json:"level"`
	About string `json:"about"`
	Says  string `json:"says"`
	Fix   string `json:"fix,omitempty"`
}

// Level is how serious a finding is.
type Level string

const (
	Note    Level = "note"
	Warning Level = "warning"
	Problem Level = "problem" // a part of the configuration cannot work
)

// VRAM is the GPU memory that kvhost takes, and the rest for a serving engine.
type VRAM struct {
	GPU         string  `json:"gpu"`
	Bytes       int64   `json:"bytes"`
	Takes       int64   `json:"takes_bytes"`
	Utilization float64 `json:"gpu_memory_utilization"` // maximum for an engine that takes a share of the whole memory
}

// Problems returns ErrProblems if a part of the configuration cannot work.
func (r *Report) Problems() error {
	for _, f := range r.Findings {
		if f.Level == Problem {
			return ErrProblems
		}
	}
	return nil
}
