package screen

import (
	"context"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"github.com/kvhost/kvhost/host/proto"
)

// Top is the model of a screen that is drawn again and again, for bubbletea.
type Top struct {
	Ask   func(context.Context) (*proto.StatusReply, error)
	Every time.Duration // between two drawings

	before, now *proto.StatusReply
	err         error
	paused      bool
	line        int // the first that is shown
	height      int // of the terminal
	width       int
}

// reading is a status, or why there is none.
type reading struct {
	status *proto.StatusReply
	err    error
}

type tick struct{}

func (t *Top) read() tea.Msg {
	ctx, stop := context.WithTimeout(context.Background(), 5*time.Second)
	defer stop()
	s, err := t.Ask(ctx)
	return reading{s, err}
}

// Init asks for the first status.
func (t *Top) Init() tea.Cmd { return t.read }

// Update takes a key, a size or a reading.
func (t *Top) Update(m tea.Msg) (tea.Model, tea.Cmd) {
	switch m := m.(type) {
	case reading:
		if t.err = m.err; m.err == nil && !t.paused {
			if t.before, t.now = t.now, m.status; t.before == nil {
				t.before = t.now
			}
		}
		return t, tea.Tick(t.Every, func(time.Time) tea.Msg { return tick{} })
	case tick:
		return t, t.read
	case tea.WindowSizeMsg:
		t.height, t.width = m.Height, m.Width
	case tea.KeyMsg:
		switch m.String() {
		case "q", "esc", "ctrl+c":
			return t, tea.Quit
		case " ":
			t.paused = !t.paused
		case "down", "j":
			t.line++
		case "up", "k":
			t.line--
		}
	}
	return t, nil
}

// View draws the part of the screen that fits.
func (t *Top) View() string {
	if t.now == nil {
		return "asking the host ..."
	}
	text := Draw(t.before, t.now)
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	fit := max(1, t.height-1)
	t.line = max(0, min(t.line, len(lines)-fit))
	lines = lines[t.line:min(len(lines), t.line+fit)]
	for i, l := range lines {
		if r := []rune(l); t.width > 0 && len(r) > t.width {
			lines[i] = string(r[:t.width])
		}
	}
	foot := "q quit  space pause  up/down scroll"
	switch {
	case t.err != nil:
		foot = "no answer: " + t.err.Error()
	case t.paused:
		foot += "  PAUSED"
	}
	return strings.Join(lines, "\n") + "\n" + foot
}
