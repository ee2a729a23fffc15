"""A headless Chromium for the tests and the benchmark of the page."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NAMES = ("chromium", "chromium-browser", "google-chrome")


def binary() -> str | None:
    """The path of a Chromium, None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def start(profile: Path) -> webdriver.Chrome:
    """A browser with a fresh profile that logs its console and its network."""
    options = webdriver.ChromeOptions()
    options.binary_location = binary() or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    options.add_experimental_option("prefs", {"download.default_directory": str(profile)})
    driver = shutil.which("chromedriver")
    browser = webdriver.Chrome(options=options, service=Service(driver) if driver else Service())
    resize(browser, 1280, 800)
    return browser


def resize(browser: webdriver.Chrome, width: int, height: int) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
    )


def open_page(browser: webdriver.Chrome, path: Path, *, dark: bool = False) -> float:
    """Opens a file and waits until it is ready; milliseconds from the start of navigation."""
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    browser.get(path.as_uri())
    wait(browser, "return document.documentElement.dataset.ready === '1'")
    return float(browser.execute_script("return window.__readyMs"))


def wait(browser: webdriver.Chrome, script: str, *arguments: Any, seconds: float = 20) -> Any:
    """What a script gives, once it is true."""
    end = time.monotonic() + seconds
    while not (value := browser.execute_script(script, *arguments)):
        if time.monotonic() > end:
            raise TimeoutError(f"{script} was never true within {seconds} s")
        time.sleep(0.02)
    return value


def complaints(browser: webdriver.Chrome) -> list[str]:
    """What the console said since the last call."""
    return [entry["message"] for entry in browser.get_log("browser")]


def requests(browser: webdriver.Chrome) -> list[str]:
    """Addresses that were asked for since the last call."""
    messages = [json.loads(row["message"])["message"] for row in browser.get_log("performance")]
    return [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
