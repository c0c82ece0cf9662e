package janitor

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"strings"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/pieceformat"
)

// namespaces finds the texts of the namespaces that a directory's files are of: those that a host kept there, and for
// each config.json that a file-system connector left in a directory <model>_<digest>, a text from which the place
// policy llmd works out the same name.
func (j *Janitor) namespaces() ([]string, error) {
	texts := append([]string(nil), j.o.Namespaces...)
	for _, dir := range pieceformat.Copies(pieceformat.NamespacesDir) {
		kept, err := j.fs.ReadDir(j.dir + "/" + dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, e := range kept {
			b, err := j.read(dir + "/" + e.Name())
			if err == nil && chunk.TextDigest(b).String() == e.Name() {
				texts = append(texts, string(b))
			}
		}
	}
	top, err := j.fs.ReadDir(j.dir)
	if err != nil {
		return nil, err
	}
	for _, e := range top {
		if !e.IsDir() || strings.HasPrefix(e.Name(), ".") {
			continue
		}
		if b, err := j.read(e.Name() + "/config.json"); err == nil {
			if text, ok := connectorText(b); ok {
				texts = append(texts, text)
			}
		}
	}
	return texts, nil
}

// connectorText makes a namespace's text of a connector's fields, which it digests as JSON with sorted keys and no
// spaces.
func connectorText(config []byte) (string, bool) {
	d := json.NewDecoder(bytes.NewReader(config))
	d.UseNumber()
	var fields map[string]any
	if d.Decode(&fields) != nil {
		return "", false
	}
	model, ok := fields["model_name"].(string)
	if !ok || strings.ContainsAny(model, "\n") {
		return "", false
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if e.Encode(fields) != nil {
		return "", false
	}
	return "extra.llmd.config=" + ascii(strings.TrimSpace(b.String())) + "\nmodel=" + model + "\n", true
}

// ascii escapes what Python's json.dumps escapes.
func ascii(s string) string {
	var b strings.Builder
	const digits = "0123456789abcdef"
	unit := func(u uint16) {
		b.WriteString(`\u`)
		for shift := 12; shift >= 0; shift -= 4 {
			b.WriteByte(digits[u>>shift&15])
		}
	}
	for _, r := range s {
		switch {
		case r < 0x80:
			b.WriteRune(r)
		case r < 0x10000:
			unit(uint16(r))
		default:
			unit(uint16(0xd800 + (r-0x10000)>>10))
			unit(uint16(0xdc00 + (r-0x10000)&0x3ff))
		}
	}
	return b.String()
}

const maxText = 4 << 20

func (j *Janitor) read(rel string) ([]byte, error) {
	f, err := j.fs.OpenFile(j.dir+"/"+rel, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil || info.Size > maxText {
		return nil, errors.Join(err, fs.ErrInvalid)
	}
	b := make([]byte, info.Size)
	n, err := f.ReadAt(b, 0)
	if err == io.EOF {
		err = nil
	}
	return b[:n], err
}
