// Compares event dispatch of package ctxsvc with cordis on Node in one run on
// one machine, and prints ratios.
//
//   node bench/ctxsvc/compare.mjs        (from the top of the repository)
//
// cordis (4.0.0-rc.8) is installed with npm into a temporary folder that is
// removed afterwards. The shapes are those of BenchmarkWaterfall and
// BenchmarkEmit in ctxsvc/bench_test.go: one integer request, listeners that
// call next and add one. cordis is measured with plain functions, which cannot
// wait for anything, and with async functions, which is what a listener that
// may ask a person or another process has to be. A Go listener may always wait.
import { execFileSync } from 'node:child_process'
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { pathToFileURL } from 'node:url'

const version = '4.0.0-rc.8'
const sizes = [1, 4, 16]
const rounds = 5 // the best round counts: the machine may be busy

const dir = mkdtempSync(join(tmpdir(), 'cordis-'))
try {
  writeFileSync(join(dir, 'package.json'), '{"private": true}')
  execFileSync('npm', ['install', '--silent', '--no-audit', '--no-fund', `cordis@${version}`], { cwd: dir, stdio: 'inherit' })
  const { Context } = await import(pathToFileURL(join(dir, 'node_modules/cordis/lib/index.js')))
  const node = {}
  for (const n of sizes) {
    const plain = new Context()
    for (let i = 0; i < n; i++) plain.on('bench', (q, next) => next() + 1)
    node[`Waterfall/${n} plain`] = await measure(() => plain.waterfall('bench', 1, (q) => q), n + 1)
    const waiting = new Context()
    for (let i = 0; i < n; i++) waiting.on('bench', async (q, next) => (await next()) + 1)
    node[`Waterfall/${n} async`] = await measure(() => waiting.waterfall('bench', 1, async (q) => q), n + 1, true)
    const told = new Context()
    let sum = 0
    for (let i = 0; i < n; i++) told.on('bench', (q) => { sum += q })
    node[`Emit/${n} plain`] = await measure(() => told.emit('bench', 1))
    const asked = new Context()
    for (let i = 0; i < n; i++) asked.on('bench', async (q) => { sum += q })
    node[`Emit/${n} async`] = await measure(() => asked.parallel('bench', 1), undefined, true)
  }

  const go = {}
  const out = execFileSync('go', ['test', '-run', '^$', '-bench', '^Benchmark(Waterfall|Emit)$', '-count', String(rounds), './ctxsvc'], { encoding: 'utf8' })
  for (const [, name, n, ns] of out.matchAll(/^Benchmark(\w+)\/listeners=(\d+)\S*\s+\d+\s+([\d.]+) ns\/op/gm)) {
    const key = `${name}/${n}`
    go[key] = Math.min(go[key] ?? Infinity, Number(ns))
  }

  console.log(`cordis ${version} on Node ${process.version}, best of ${rounds}; ns per dispatch, ratio = Go / cordis`)
  console.log('event          listeners       Go    cordis plain   ratio    cordis async   ratio')
  for (const name of ['Waterfall', 'Emit']) {
    for (const n of sizes) {
      const g = go[`${name}/${n}`]
      const cell = (how) => {
        const c = node[`${name}/${n} ${how}`]
        return `${c.toFixed(0).padStart(15)} ${(g / c).toFixed(3).padStart(7)}`
      }
      console.log(`${name.padEnd(14)} ${String(n).padStart(9)} ${g.toFixed(0).padStart(8)} ${cell('plain')} ${cell('async')}`)
    }
  }
} finally {
  rmSync(dir, { recursive: true, force: true })
}

// measure returns nanoseconds per call.
async function measure(fn, want, awaited) {
  const run = awaited
    ? async (n) => { let a; for (let i = 0; i < n; i++) a = await fn(); return a }
    : (n) => { let a; for (let i = 0; i < n; i++) a = fn(); return a }
  let n = 1000
  let best = Infinity
  await run(n) // warm
  for (let round = 0; round < rounds; round++) {
    for (;;) {
      const start = process.hrtime.bigint()
      const a = await run(n)
      const ns = Number(process.hrtime.bigint() - start)
      if (want !== undefined && a !== want) throw new Error(`dispatch returned ${a}, want ${want}`)
      if (ns < 2e8) { n *= 2; continue }
      best = Math.min(best, ns / n)
      break
    }
  }
  return best
}
