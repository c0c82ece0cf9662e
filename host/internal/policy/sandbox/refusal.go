package sandbox

import (
	"strings"
	"unicode"
)

// Shorten gives an error about a module a bounded text.
func Shorten(err error) error { return shortened{err} }

// shortened is an error with a bounded, printable text. A validator repeats names of a module, which may be long.
type shortened struct{ error }

const maxRefusal = 2048

func (s shortened) Error() string {
	text := s.error.Error()
	if len(text) > maxRefusal {
		text = strings.ToValidUTF8(text[:maxRefusal], "") + "..."
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) || r == '\n' {
			return r
		}
		return '?'
	}, text)
}

func (s shortened) Unwrap() error { return s.error }
