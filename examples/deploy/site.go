package main

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"unicode"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/parser"
	"github.com/yuin/goldmark/renderer/html"
	"github.com/yuin/goldmark/text"
)

//go:embed site
var site embed.FS

// sitePage is a page that is made from a document.
type sitePage struct {
	From string // path of the Markdown file in the repository
	File string
	Menu string // name in the menu
}

type siteGroup struct {
	Name  string
	Pages []sitePage
}

// sitePages are the pages of the manual in the order of the menu.
var sitePages = []siteGroup{
	{"Use", []sitePage{
		{"README.md", "index.html", "kvhost"}, {"host/docs/get-started.md", "get-started.html", "Get started"},
		{"host/docs/operate.md", "operate.html", "Operate"}, {"host/docs/engines.md", "engines.html", "Engines"},
		{"host/docs/s3.md", "s3.html", "Buckets"}, {"host/docs/peers.md", "peers.html", "Peers"},
		{"host/docs/names.md", "names.html", "Names of other caches"}, {"host/docs/reference.md", "reference.html", "Reference"},
	}},
	{"Extend", []sitePage{
		{"host/docs/policies.md", "policies.html", "Policies"}, {"abi/GUIDE.md", "guide.html", "Write a policy"},
		{"abi/SPEC.md", "spec.html", "Policy ABI"}, {"host/client/python/README.md", "python.html", "Python client"},
	}},
	{"Understand", []sitePage{
		{"host/docs/design.md", "design.html", "Design"}, {"host/docs/rationale.md", "rationale.html", "Rationale"},
		{"host/docs/formats.md", "formats.html", "Formats"}, {"host/docs/figures.md", "figures.html", "Figures"},
	}},
	{"Project", []sitePage{
		{"host/docs/releases.md", "releases.html", "What 0.1 keeps"}, {".github/CHANGELOG.md", "changelog.html", "Changelog"},
		{".github/SECURITY.md", "security.html", "Security"},
	}},
}

// siteSection is a section of a page in the search index.
type siteSection struct {
	File  string `json:"file"`
	Page  string `json:"page"`
	ID    string `json:"id"`
	Title string `json:"title"`
	Text  string `json:"text"`
}

// site writes the manual as a site that needs no server and no network: a page for each document, and a search over
// them.
func (r *release) site(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	frame, err := template.ParseFS(site, "site/page.html")
	if err != nil {
		return err
	}
	const settings = "examples/kvhost.toml"
	pages := map[string]string{settings: filepath.Base(settings)} // by the path of the Markdown file
	for _, g := range sitePages {
		for _, p := range g.Pages {
			pages[p.From] = p.File
		}
	}
	var found []siteSection
	copied := []string{settings}
	for _, g := range sitePages {
		for _, p := range g.Pages {
			source, err := os.ReadFile(p.From)
			if err != nil {
				return err
			}
			body, sections, images, err := sitePageOf(p, source, pages)
			if err != nil {
				return fmt.Errorf("%s: %w", p.From, err)
			}
			copied = append(copied, images...)
			var b bytes.Buffer
			err = frame.Execute(&b, map[string]any{"Title": sections[0].Title, "File": p.File, "Version": r.version, "Groups": sitePages, "Body": body})
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, p.File), b.Bytes(), 0o644)
			}
			if err != nil {
				return err
			}
			found = append(found, sections...)
		}
	}
	list, err := json.Marshal(found)
	errs := []error{err, os.WriteFile(filepath.Join(dir, "sections.js"), fmt.Appendf(nil, "const sections = %s;\n", list), 0o644)}
	for _, name := range copied {
		text, err := os.ReadFile(name)
		errs = append(errs, err, os.WriteFile(filepath.Join(dir, filepath.Base(name)), text, 0o644))
	}
	for _, name := range []string{"site.css", "site.js"} {
		text, err := fs.ReadFile(site, "site/"+name)
		errs = append(errs, err, os.WriteFile(filepath.Join(dir, name), text, 0o644))
	}
	return errors.Join(errs...)
}

// sitePageOf converts a document to HTML. Links lead to pages of the site if it has them. sections are the sections of the page, and images
// are the images that it shows.
func sitePageOf(p sitePage, source []byte, pages map[string]string) (body template.HTML, sections []siteSection, images []string, err error) {
	md := goldmark.New(
		goldmark.WithExtensions(extension.Strikethrough, extension.Linkify,
			extension.NewTable(extension.WithTableCellAlignMethod(extension.TableCellAlignAttribute))), // a style attribute would need another content policy
		goldmark.WithParserOptions(parser.WithAutoHeadingID()),
		goldmark.WithRendererOptions(html.WithUnsafe()), // for comments and <a name="">, since the text is trusted
	)
	doc := md.Parser().Parse(text.NewReader(source), parser.WithContext(parser.NewContext(parser.WithIDs(&slugs{}))))
	err = ast.Walk(doc, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if !entering {
			return ast.WalkContinue, nil
		}
		switch n := n.(type) {
		case *ast.Link:
			n.Destination = []byte(siteLink(p.From, string(n.Destination), pages))
		case *ast.Image:
			image := path.Join(path.Dir(p.From), string(n.Destination))
			images = append(images, image)
			n.Destination = []byte(path.Base(image))
		}
		return ast.WalkContinue, nil
	})
	if err != nil {
		return "", nil, nil, err
	}
	for n := doc.FirstChild(); n != nil; n = n.NextSibling() {
		if h, ok := n.(*ast.Heading); ok {
			id, _ := h.AttributeString("id")
			s := siteSection{File: p.File, Page: p.Menu, Title: plain(h, source)}
			if h.Level > 1 {
				s.ID = string(id.([]byte))
			}
			sections = append(sections, s)
			continue
		}
		if len(sections) == 0 {
			return "", nil, nil, errors.New("it has text before its title")
		}
		if n.Kind() != ast.KindHTMLBlock {
			s := &sections[len(sections)-1]
			s.Text = strings.TrimSpace(s.Text + " " + plain(n, source))
		}
	}
	var b bytes.Buffer
	if err := md.Renderer().Render(&b, source, doc); err != nil {
		return "", nil, nil, err
	}
	// A table may be wider than its page.
	inBox := strings.NewReplacer("<table>", `<div class="wide"><table>`, "</table>", "</table></div>").Replace(b.String())
	return template.HTML(inBox), sections, images, nil
}

// siteLink returns the target of a document's link, relative to its page.
func siteLink(from, to string, pages map[string]string) string {
	file, at, _ := strings.Cut(to, "#")
	if strings.Contains(to, ":") || file == "" {
		return to
	}
	if at != "" {
		at = "#" + at
	}
	file = path.Join(path.Dir(from), file)
	if page := pages[file]; page != "" {
		return page + at
	}
	return "https://github.com/kvhost/kvhost/blob/main/" + file + at
}

// plain returns the text of a node in one line.
func plain(n ast.Node, source []byte) string {
	var b strings.Builder
	_ = ast.Walk(n, func(n ast.Node, entering bool) (ast.WalkStatus, error) { // the function returns no errors
		switch n := n.(type) {
		case *ast.Text:
			if entering {
				b.Write(n.Value(source))
				if n.SoftLineBreak() || n.HardLineBreak() {
					b.WriteByte(' ')
				}
			}
		case *ast.String:
			if entering {
				b.Write(n.Value)
			}
		case *ast.AutoLink:
			if entering {
				b.Write(n.Label(source))
			}
		case *ast.FencedCodeBlock, *ast.CodeBlock:
			if entering {
				for i := range n.Lines().Len() {
					line := n.Lines().At(i)
					b.Write(line.Value(source))
				}
			}
		default:
			if !entering && n.Type() == ast.TypeBlock {
				b.WriteByte(' ')
			}
		}
		return ast.WalkContinue, nil
	})
	return strings.Join(strings.Fields(b.String()), " ")
}

// target matches the target of a link.
var target = regexp.MustCompile(`\]\([^)]*\)`)

// slugs names headings as GitHub does, so that the same links work there.
type slugs struct{ taken map[string]int }

func (s *slugs) Generate(value []byte, _ ast.NodeKind) []byte {
	id := strings.Map(func(c rune) rune {
		switch {
		case c == ' ':
			return '-'
		case c == '-' || c == '_' || unicode.IsLetter(c) || unicode.IsDigit(c):
			return unicode.ToLower(c)
		}
		return -1
	}, strings.TrimSpace(target.ReplaceAllString(string(value), "")))
	if s.taken == nil {
		s.taken = map[string]int{}
	}
	n := s.taken[id]
	s.taken[id]++
	if n > 0 {
		id = fmt.Sprintf("%s-%d", id, n)
	}
	return []byte(id)
}

func (s *slugs) Put([]byte) {}
