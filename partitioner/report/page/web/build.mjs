// Writes vendor/*.js and LICENSES.txt. Run when a library changes: npm ci && npm run build
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const BUNDLES = { graph: "graphs", charts: "charts" }; // file -> global
const LICENCES = ["LICENSE", "LICENSE.txt", "CopyrightNotice.txt", "NOTICE", "licenses/LICENSE-d3"];
const LIMIT_BYTES = 1_000_000; // of each file

const folder = new URL(".", import.meta.url).pathname;
const read = (path) => readFileSync(folder + path, "utf8");
const about = (name) => JSON.parse(read(`node_modules/${name}/package.json`));
const named = (name) => `${name} ${about(name).version} (${about(name).license})`;

/** Name, version and licence texts of a library. */
function licence(name) {
  const files = LICENCES.map((file) => `node_modules/${name}/${file}`);
  const texts = files.filter((file) => existsSync(folder + file)).map((file) => read(file).trim());
  if (!texts.length) throw new Error(`${name} has no licence text`);
  return `${named(name)}\n${"=".repeat(72)}\n\n${texts.join("\n\n")}\n`;
}

/** The libraries whose code is in a bundle. */
function libraries(metafile) {
  const paths = Object.keys(metafile.inputs).filter((path) => path.startsWith("node_modules/"));
  return [...new Set(paths.map((path) => path.match(/^node_modules\/((?:@[^/]+\/)?[^/]+)/)[1]))];
}

/** Writes vendor/NAME.js; the libraries in it. */
async function bundle(name, globalName) {
  const options = {
    absWorkingDir: folder,
    entryPoints: [`vendor/${name}.mjs`],
    outfile: `vendor/${name}.js`,
    bundle: true,
    minify: true,
    format: "iife",
    globalName,
    target: "es2020",
    charset: "ascii",
    legalComments: "none",
    define: { "process.env.NODE_ENV": '"production"' },
    metafile: true,
  };
  const { metafile } = await build({ ...options, write: false });
  const used = libraries(metafile);
  const js = `/* ${used.map(named).join(", ")}: licences in LICENSES.txt */`;
  await build({ ...options, banner: { js } });
  const { length } = readFileSync(`${folder}vendor/${name}.js`);
  if (length >= LIMIT_BYTES) throw new Error(`${name}.js: ${length} bytes, limit ${LIMIT_BYTES}`);
  console.log(`vendor/${name}.js: ${length} bytes of ${used.map(named).join(", ")}`);
  return used;
}

const used = [];
for (const [name, globalName] of Object.entries(BUNDLES))
  used.push(...(await bundle(name, globalName)));
const texts = used.sort().map(licence).join("\n\n");
writeFileSync(`${folder}LICENSES.txt`, `The libraries in vendor/*.js.\n\n${texts}`);
