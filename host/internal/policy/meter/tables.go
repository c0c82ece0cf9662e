package meter

// scanTables reads the table section and gives each table a maximum: without one table.grow could take the host's
// memory, which is not the guest's and has no other bound.
func (m *module) scanTables(r *reader) {
	n := r.count()
	m.limit(r, m.limits.Tables, n, "tables")
	m.tables = appendU32(nil, n)
	for range n {
		kind := r.byte()
		if kind != valFuncref && kind != valExternref && r.err == nil {
			r.fail("table of type 0x%02x", kind)
			return
		}
		least, most := m.scanLimits(r, m.limits.TableElements, "table elements")
		m.tables = append(m.tables, kind)
		if limit := uint32(m.limits.TableElements); limit > 0 {
			most = min(most, limit)
		}
		if most == unbounded {
			m.tables = appendU32(append(m.tables, 0), least)
			continue
		}
		m.tables = appendU32(appendU32(append(m.tables, 1), least), most)
	}
}

// unbounded is the maximum of a table that has none.
const unbounded = 1<<32 - 1

func (m *module) scanLimits(r *reader, limit int, what string) (least, most uint32) {
	flags := r.byte()
	if flags > 1 && r.err == nil {
		r.fail("flags 0x%02x of %s", flags, what)
		return 0, unbounded
	}
	least, most = r.u32(), unbounded
	m.limit(r, limit, least, what)
	if flags&1 != 0 {
		most = r.u32()
		m.limit(r, limit, most, what)
	}
	return least, most
}

// scanElements walks one element segment, so that a count that its bytes cannot back is refused before a compiler
// reserves room for it.
func scanElements(r *reader) {
	flags := r.u32()
	if flags > 7 && r.err == nil {
		r.fail("element segment of form %d", flags)
		return
	}
	const passive, indexed, expressions = 1, 2, 4
	if flags&passive == 0 {
		if flags&indexed != 0 {
			r.u32()
		}
		r.constant()
	}
	if flags&(passive|indexed) != 0 {
		r.byte() // the kind or type of element
	}
	for range r.count() {
		if flags&expressions != 0 {
			r.constant()
		} else {
			r.u32()
		}
	}
}
