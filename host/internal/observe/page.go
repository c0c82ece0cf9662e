package observe

import (
	"embed"
	"net/http"
	"os"
	"path/filepath"
)

//go:embed page
var page embed.FS

// contentPolicy allows the page to use only its own files.
const contentPolicy = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// manualElsewhere is the address of the manual for a program that was installed without it.
const manualElsewhere = "https://github.com/kvhost/kvhost/blob/main/host/docs/operate.md"

// servePage serves the page at /, its files, and the manual.
func servePage(mux *http.ServeMux, manual []string) {
	for path, file := range map[string]string{"/{$}": "index.html", "/page.css": "page.css", "/page.js": "page.js"} {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) {
			alone(w.Header())
			http.ServeFileFS(w, r, page, "page/"+file)
		})
	}
	mux.HandleFunc("GET /manual/{file...}", func(w http.ResponseWriter, r *http.Request) {
		for _, dir := range manual {
			root, err := os.OpenRoot(dir) // opened for each request, because an upgrade may add or remove it
			if err != nil {
				continue
			}
			defer root.Close()
			alone(w.Header())
			http.StripPrefix("/manual", http.FileServerFS(root.FS())).ServeHTTP(w, r)
			return
		}
		http.Redirect(w, r, manualElsewhere, http.StatusFound)
	})
}

// alone sets the headers that keep a page from using resources of other sites.
func alone(h http.Header) {
	h.Set("Content-Security-Policy", contentPolicy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
}

// manuals returns the directories in which packages, wheels, tarballs and make install a program's manual.
func manuals() []string {
	program, err := os.Executable()
	if err != nil {
		return nil
	}
	bin := filepath.Dir(program)
	return []string{filepath.Join(bin, "..", "share", "kvhost", "manual"), filepath.Join(bin, "manual")}
}
