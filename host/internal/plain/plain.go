// Package plain makes foreign text safe to show on a terminal. Names of models, engines and paths, and messages of servers, peers and
// clients, may contain control sequences (ESC, OSC, bell) and characters that change the direction of a line.
package plain

import (
	"fmt"
	"io"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// Text returns a text of one or more lines in safe form. Invisible characters, except tabs and line ends, are escaped as in JSON, so that a
// JSON text keeps its meaning.
func Text(s string) string {
	if strings.IndexFunc(s, hidden) < 0 && utf8.ValidString(s) {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		switch hi, lo := utf16.EncodeRune(r); {
		case !hidden(r):
			b.WriteRune(r)
		case hi != unicode.ReplacementChar:
			fmt.Fprintf(&b, `\u%04x\u%04x`, hi, lo)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}

// Line is Text in a single line.
func Line(s string) string {
	return oneLine.Replace(Text(s))
}

var oneLine = strings.NewReplacer("\n", `\n`, "\t", `\t`)

func hidden(r rune) bool { return !unicode.IsPrint(r) && r != '\n' && r != '\t' }

// Writer returns a writer that converts as Text does.
func Writer(w io.Writer) io.Writer { return &writer{to: w} }

type writer struct {
	to   io.Writer
	part []byte // the bytes of an incomplete character
}

// Write implements [io.Writer].
func (w *writer) Write(p []byte) (int, error) {
	b := append(w.part, p...)
	end := len(b)
	for n := 1; n < utf8.UTFMax && n <= len(b); n++ {
		if utf8.RuneStart(b[len(b)-n]) {
			if !utf8.FullRune(b[len(b)-n:]) {
				end = len(b) - n
			}
			break
		}
	}
	w.part = append([]byte(nil), b[end:]...)
	_, err := io.WriteString(w.to, Text(string(b[:end])))
	return len(p), err
}
