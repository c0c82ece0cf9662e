package observe

import (
	"embed"
	"net/http"
)

//go:embed page
var page embed.FS

// contentPolicy lets the page use nothing but what comes with it.
const contentPolicy = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// servePage serves the page's files: / and what it loads.
func servePage(mux *http.ServeMux) {
	for path, file := range map[string]string{"/{$}": "index.html", "/page.css": "page.css", "/page.js": "page.js"} {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) {
			h := w.Header()
			h.Set("Content-Security-Policy", contentPolicy)
			h.Set("X-Content-Type-Options", "nosniff")
			h.Set("Referrer-Policy", "no-referrer")
			http.ServeFileFS(w, r, page, "page/"+file)
		})
	}
}
