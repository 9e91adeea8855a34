# SPDX-License-Identifier: Apache-2.0
"""axe-core, which finds what is not accessible on a page in the browser."""

from __future__ import annotations

import functools

from support.browser import WEB, Browser
from support.node import node_project

#: Returns what axe-core finds as lines.
AXE = """
const done = arguments[arguments.length - 1];
const why = (node) => [...node.any, ...node.all, ...node.none].map((one) => one.message)[0];
axe.run(document, {resultTypes: ["violations"]}).then(
  (found) => done(found.violations.flatMap((rule) => rule.nodes.map(
    (node) => `${rule.id}: ${node.target} ${why(node)}`))),
  (error) => done([String(error)]));
"""


@functools.cache
def _source() -> str:
    return (node_project(WEB) / "node_modules/axe-core/axe.min.js").read_text("utf-8")


def accessible(browser: Browser) -> list[str]:
    """Return what axe-core finds on the page that the browser shows."""
    browser.run(_source())
    found: list[str] = browser.driver.execute_async_script(AXE)
    return found
