// The theme, set before anything is drawn: a classic script, so that the page never flashes in the wrong one.
"use strict";

const THEMES = new Set(["auto", "light", "dark"]);
const THEME_KEY = "outrider-theme";

function applyTheme(name) {
  document.documentElement.dataset.theme = THEMES.has(name) ? name : "auto";
}

function storedTheme() {
  try {
    return localStorage.getItem(THEME_KEY);
  } catch {
    return null; // storage is switched off: the system's theme, and nothing is kept
  }
}

function keepTheme(name) {
  try {
    localStorage.setItem(THEME_KEY, name);
  } catch {
    return;
  }
}

applyTheme(storedTheme());

document.addEventListener("DOMContentLoaded", () => {
  const select = document.getElementById("theme");
  select.value = document.documentElement.dataset.theme;
  select.addEventListener("change", () => {
    applyTheme(select.value);
    keepTheme(select.value);
  });
});
