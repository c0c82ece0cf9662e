package spans

import (
	"bufio"
	"bytes"
	"fmt"
	"net/textproto"
	"net/url"
	"strings"
	"unicode/utf8"
)

// Endpoint parses the address of a collector: http or https, a host, and the path of traces. The path is /v1/traces if there is none. A
// password is refused.
func Endpoint(text string) (string, error) {
	bad := func(why string) (string, error) { return "", fmt.Errorf("%w: %q: %s", ErrEndpoint, text, why) }
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return "", fmt.Errorf("%w: want a URL such as http://127.0.0.1:4318", ErrEndpoint) // without the parser's error, which would repeat the text with its secrets
	case u.User != nil:
		return "", fmt.Errorf("%w: a password belongs into otlp.headers_file", ErrEndpoint)
	case u.Scheme != "http" && u.Scheme != "https":
		return bad("want http:// or https://")
	case u.Hostname() == "":
		return bad("no host")
	case u.RawQuery != "" || u.Fragment != "":
		return bad("want no query and no fragment")
	}
	if u.Path == "" || u.Path == "/" {
		u.Path = "/v1/traces"
	}
	return u.String(), nil
}

// MaxHeaders is the maximum size of a file of headers.
const MaxHeaders = 16 << 10

// Headers parses headers for a collector, with one "Name: value" in a line. Empty lines and lines that begin with # are
// skipped. Errors do not repeat the content of the file.
func Headers(file []byte) (map[string]string, error) {
	headers := map[string]string{}
	lines := bufio.NewScanner(bytes.NewReader(file))
	lines.Buffer(nil, MaxHeaders+1)
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || line[0] == '#' {
			continue
		}
		name, value, ok := strings.Cut(line, ":")
		name, value = textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name)), strings.TrimSpace(value)
		if !ok || strings.Trim(name, token) != "" || name == "" {
			return nil, fmt.Errorf("%w: line %d: want Name: value", ErrHeaders, n)
		}
		if !utf8.ValidString(value) || strings.ContainsFunc(value, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }) {
			return nil, fmt.Errorf("%w: line %d: a control character in the value", ErrHeaders, n)
		}
		switch name {
		case "Content-Type", "Content-Length", "Content-Encoding", "Transfer-Encoding", "Host", "Connection", "Trailer":
			return nil, fmt.Errorf("%w: line %d: %s is the host's own", ErrHeaders, n, name)
		}
		if _, twice := headers[name]; twice {
			return nil, fmt.Errorf("%w: line %d: %s for the second time: put its values into one line, with commas", ErrHeaders, n, name)
		}
		headers[name] = value
	}
	return headers, lines.Err()
}

// token contains the characters that are allowed in a header's name.
const token = "!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
