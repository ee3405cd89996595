// A report: the whole state stands in the file.
"use strict";
new window.ps.Page(false).take(JSON.parse(document.getElementById("job").textContent));
