// A report: the whole state stands in the file.
"use strict";
new window.ps.Page().take(JSON.parse(document.getElementById("job").textContent));
