package process

// BeforeExec sets what runs between the check of an executable and its execution.
func BeforeExec(fn func(path string)) { beforeExec = fn }

// Frames is how many frames came on the control stream.
func (g *Generation) Frames() uint64 { return g.control.frames.Load() }
